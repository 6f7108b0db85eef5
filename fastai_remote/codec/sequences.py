"""Drawings as sequences of steps of a pen, for recurrent networks

Docs: page `codec/sequences`"""
import numpy as np

from .strokes import as_strokes, unpack_strokes

# --- StrokeSequence

# A picture loses the order in which a drawing was made. sketch-rnn reads and writes drawings as steps of a pen. The
# conversion loses nothing: the sums of dx and dy are the points.

class StrokeSequence:
    """Turns drawings into sequences for recurrent networks, in the formats of sketch-rnn (Ha and Eck, 2017)

    `create` and `batch` take strokes, `of_points` takes points with times. Each row is a step of the pen: dx and dy
    from the point before, the first one from (0, 0), with `time` the seconds since then, and the state of the pen.
    `fmt=5` has three states, one of which is 1: the pen draws on, it is lifted after this point, or the drawing has
    ended. The last row is 0 but for a 1 at its end; padding, which is added when batches are made, is such rows.
    `fmt=3` has one state, 1 if the pen is lifted after this point, and no row for the end. Points beyond `max_len` are
    cut off."""
    def __init__(self,
        fmt:int=5, # 5 or 3 columns
        scale:float=1., # What dx and dy are multiplied by
        max_len:int=None, # Points of a drawing that are used, at most; default: all
        time:bool=False, # A column after dx and dy for the seconds since the point before? For fields `points.npy`
    ):
        if fmt not in (3, 5): raise ValueError(f'fmt must be 3 or 5, not {fmt!r}')
        if max_len is not None and max_len<1: raise ValueError(f'max_len must be at least 1, not {max_len}')
        self.fmt,self.scale,self.max_len,self.time = fmt,scale,max_len,time

    def create(self,
        b:bytes|list # A drawing: stored bytes, or strokes of shape (2,n)
    )->np.ndarray: # `float32`, shape (steps, `fmt`)
        "The sequence of one drawing; raises `ValueError` if `b` is damaged or no drawing, and always if `time` is set"
        if self.time:
            raise ValueError('strokes have no times; drawing_samples(…, times=True) keeps them in the field '
                             "'points.npy'")
        strokes = unpack_strokes(b) if isinstance(b, bytes) else as_strokes(b)
        lifted = np.zeros(sum(s.shape[1] for s in strokes), bool)
        lifted[np.cumsum([s.shape[1] for s in strokes])-1] = True
        return self._steps(np.concatenate(strokes, 1).T.astype(np.float64), lifted)

    def batch(self, drawings:list)->list:
        "The sequences of `drawings`, bytes or strokes, as `create` makes them"
        return [self.create(o) for o in drawings]

    def of_points(self,
        points:np.ndarray # Shape (n,4): x, y, milliseconds, 1 for the last point of a stroke
    )->np.ndarray: # `float32`, shape (steps, `fmt`), with `time` one column more
        "The sequence of a drawing that is stored as points with times; raises `ValueError` for another shape"
        points = np.asarray(points, np.float64)
        if points.ndim!=2 or points.shape[1]!=4: raise ValueError(f'want points of shape (n,4), got {points.shape}')
        return self._steps(points[:,:3] if self.time else points[:,:2], points[:,3]>0)

    def _steps(self, points, lifted):
        "The sequence of `points`, (n,2), or (n,3) with times; `lifted`, bool, marks the last point of each stroke"
        points,lifted = points[:self.max_len],lifted[:self.max_len]
        n,dims = points.shape
        steps = np.zeros((n+(self.fmt==5), dims+self.fmt-2), np.float32)
        steps[:n,:dims] = np.diff(points, axis=0, prepend=0)
        steps[:n,:2] *= self.scale
        steps[:n,2:dims] /= 1000
        steps[:n,dims+(self.fmt==5)] = lifted
        if self.fmt==5:
            steps[:n,dims] = ~lifted
            steps[n,-1] = 1
        return steps

    def __repr__(self):
        return f'StrokeSequence(fmt={self.fmt}, scale={self.scale:g}, max_len={self.max_len}, time={self.time})'

"""Which samples are where: tables of runs

Docs: page `runs`"""

# A dataset consists of *parts*, each of which was written at one time and never changes. A table of runs says where the
# samples of a version are, and a table of gaps which samples of a part have failed. Both are arrays, and looking up a
# batch takes one binary search, so that neither time nor memory grows much with the number of samples.

import numpy as np

# --- Runs

# Samples that are in the same part, one after the other, are a run. Most tables have few runs: a dataset that was
# appended to twice has three for each split.

MAX_RUNS = 1<<20   # runs of a table, which take 24 bytes each in every process

class RunTable:
    """Where the samples of a dataset are, if it consists of several parts: runs of consecutive samples of a part

    A table is not changed: `drop`, `replace` and `insert` return new ones, and may raise `TooManyRuns`."""
    def __init__(self,
        starts, # The number of the first sample of each run, ascending from 0, shape (k,)
        parts, # The part that each run is in, shape (k,)
        firsts, # The number that the first sample of each run has in its part, shape (k,)
        n:int # Number of samples
    ):
        "Raises `ValueError` if these are no runs of `n` samples, and `TooManyRuns` if they are more than `MAX_RUNS`"
        self.starts,self.parts,self.firsts = (np.asarray(a, np.int64) for a in (starts,parts,firsts))
        self.n = n
        if not len(self.starts)==len(self.parts)==len(self.firsts): raise ValueError('columns of different lengths')
        if list(self.starts[:1])!=[0][:n]: raise ValueError(f'{n} samples, of which the first is in no run')
        if (self.lengths<1).any() or (self.parts<0).any() or (self.firsts<0).any(): raise ValueError('a run of nothing')
        if len(self.starts)>MAX_RUNS: raise TooManyRuns(len(self.starts), MAX_RUNS)

    @classmethod
    def whole(cls,
        n:int, # Number of samples
        part:int=0 # The part that they are in
    ):
        "The table of `n` samples that are all in one part, under the same numbers"
        return cls([0][:n], [part][:n], [0][:n], n)

    @property
    def lengths(self)->np.ndarray:
        "The number of samples of each run"
        return np.diff(self.starts, append=self.n)

    def __len__(self): return len(self.starts)

    @property
    def is_whole(self)->bool:
        "Are all samples in one part, under the same numbers?"
        return len(self.starts)==1 and not self.firsts[0]

    def locate(self,
        numbers:np.ndarray # Sample numbers, int64, shape (n,)
    )->tuple: # Two arrays of shape (n,)
        "The part that each sample is in, and its number there"
        runs = np.searchsorted(self.starts, numbers, 'right')-1
        return self.parts[runs],self.firsts[runs]+numbers-self.starts[runs]

    def groups(self,
        numbers:np.ndarray # Sample numbers, int64, shape (n,)
    ): # Yields `(part, places in numbers, their numbers in the part)`
        "The samples `numbers`, grouped by the part that they are in"
        parts,inside = self.locate(numbers)
        for part in np.unique(parts).tolist():
            places = np.flatnonzero(parts==part)
            yield part,places,inside[places]

    def _split(self, numbers):
        """Starts of runs such that each of `numbers`, and each run of this table, begins one; their parts and firsts

        Three int64 arrays of the same length. Numbers that are not in [0, n) are ignored."""
        starts = np.unique(np.concatenate([self.starts, numbers[(numbers>=0)&(numbers<self.n)]]))
        return starts,*self.locate(starts)

    @classmethod
    def _joined(cls, lengths, parts, firsts):
        """A table of runs with these lengths, parts and firsts, three int64 arrays, in the order of the samples

        Runs of length 0 are left out, and neighbours are made one where they continue each other."""
        kept = lengths>0
        lengths,parts,firsts = lengths[kept],parts[kept],firsts[kept]
        continues = (parts[1:]==parts[:-1])&(firsts[1:]==firsts[:-1]+lengths[:-1])
        begins = np.concatenate([np.ones(min(len(parts), 1), bool), ~continues])
        ends = np.cumsum(lengths)
        n = int(ends[-1]) if len(ends) else 0
        return cls((ends-lengths)[begins], parts[begins], firsts[begins], n)

    def drop(self,
        numbers:np.ndarray # Sample numbers, ascending, without repetitions
    ):
        "A new table without the samples `numbers`; those behind them move up"
        starts,parts,firsts = self._split(np.concatenate([numbers, numbers+1]))
        lengths = np.diff(starts, append=self.n)
        lengths[np.isin(starts, numbers, assume_unique=True)] = 0
        return self._joined(lengths, parts, firsts)

    def replace(self,
        numbers:np.ndarray, # Sample numbers, ascending, without repetitions
        part:int # The part that has them now, under the numbers 0, 1, 2, …
    ):
        "A new table in which the samples `numbers` are in another part"
        starts,parts,firsts = self._split(np.concatenate([numbers, numbers+1]))
        at = np.searchsorted(starts, numbers)
        parts[at],firsts[at] = part,np.arange(len(numbers))
        return self._joined(np.diff(starts, append=self.n), parts, firsts)

    def insert(self,
        at:int, # The number that the first new sample gets, 0 to the number of samples
        part:int, # The part that the new samples are in
        first:int, # Number of the first of them in the part
        n:int # How many they are
    ):
        "A new table with `n` more samples; those from `at` on move back. Raises `TooManyRuns`."
        starts,parts,firsts = self._split(np.array([at]))
        k = np.searchsorted(starts, at)
        lengths = np.insert(np.diff(starts, append=self.n), k, n)
        return self._joined(lengths, np.insert(parts, k, part), np.insert(firsts, k, first))

    def to_bytes(self)->bytes:
        "The runs as they are stored: starts, parts and firsts, each as int64, little-endian"
        return np.stack([self.starts, self.parts, self.firsts]).astype('<i8').tobytes()

    @classmethod
    def from_bytes(cls,
        stored:bytes, # What `to_bytes` returned
        n:int # Number of samples
    ):
        "The table; raises `ValueError` if `stored` cannot be one of `n` samples"
        return cls(*np.frombuffer(stored, '<i8').reshape(3, -1), n)

def pack_tables(
    tables:list # Of `RunTable`
)->bytes:
    "The tables as they are stored, one behind the other"
    return b''.join(table.to_bytes() for table in tables)

def unpack_tables(
    stored:bytes, # What `pack_tables` returned
    lengths:list, # Number of runs of each table
    n:int # Number of samples
)->list: # Of `RunTable`
    "The tables in `stored`; raises `ValueError` if these cannot be tables of `n` samples"
    ends = 24*np.cumsum([0,*lengths])
    if ends[-1]!=len(stored): raise ValueError('bytes of other tables')
    return [RunTable.from_bytes(stored[start:end], n) for start,end in zip(ends, ends[1:])]

class TooManyRuns(ValueError):
    "A table would take too much memory, as the samples that are changed, or failed, are scattered over a large dataset"
    def __init__(self,
        n:int, # Runs that there would be
        most:int, # Runs that are supported
        # End of the message
        advice:str='dropped or changed: make a new dataset, by store.copy or store.map(fn, name=…)'
    ):
        super().__init__(f'{n:,} runs of consecutive samples, where {most:,} are supported, as so many samples are '
                         f'{advice}')

# Here five samples are dropped from one hundred, two are replaced, and ten more are inserted.

# --- Gaps

# An ingest writes each sample under its place in the plan, so that whatever is repeated writes the same samples under
# the same numbers. A sample that fails leaves a gap. Nothing moves when the ingest is committed: from outside, the
# samples of a part are numbered without gaps, and the table gives the place of a number.

MAX_GAPS = 1<<23 # Runs of places without a sample in a part

class GapTable:
    """The places of a part that have no sample, as theirs has failed: runs of consecutive places

    A place is a number in the plan of the ingest. The samples are numbered without gaps, in the order of their places.
    In memory, a run takes 8 bytes, or 16 where there are more than 2**32 places."""
    def __init__(self,
        starts, # The first place of each run, ascending, shape (k,)
        lengths, # Number of places of each run, shape (k,)
        n_places:int # Places of the part, with and without a sample
    ):
        "Raises `ValueError` if these are no separate runs of `n_places` places, and `TooManyRuns`"
        starts,lengths = (np.asarray(a, np.int64) for a in (starts,lengths))
        if len(starts)>MAX_GAPS:
            raise TooManyRuns(len(starts), MAX_GAPS, 'without a value: leave them out of the source')
        if len(starts)!=len(lengths): raise ValueError('columns of different lengths')
        if (starts<0).any() or (lengths<1).any() or (lengths>n_places-starts).any():
            raise ValueError(f'a run of nothing, or beyond {n_places} places')
        if (starts[1:]<=(starts+lengths)[:-1]).any(): raise ValueError('runs that are not separate')
        kind = np.uint32 if n_places<1<<32 else np.int64
        before = np.concatenate([[0], np.cumsum(lengths)])
        self.n_places,self.n = n_places,n_places-int(before[-1])
        self._firsts = (starts-before[:-1]).astype(kind) # The number of the first sample behind each run
        self._before = before.astype(kind) # Places without a sample before each run, and in all

    def __len__(self): return len(self._firsts)

    @property
    def starts(self)->np.ndarray:
        "The first place of each run, int64"
        return self._firsts.astype(np.int64)+self._before[:-1]

    def places(self,
        numbers:np.ndarray # Numbers of samples, int64, shape (n,)
    )->np.ndarray: # int64, shape (n,)
        "The places of samples"
        return numbers+self._before[np.searchsorted(self._firsts, numbers.astype(self._firsts.dtype), 'right')]

    def gaps(self)->np.ndarray: # int64
        "The places without a sample"
        lengths = np.diff(self._before.astype(np.int64))
        return np.repeat(self.starts-(np.cumsum(lengths)-lengths), lengths)+np.arange(lengths.sum())

    def samples_before(self,
        places # Places, 0 to `n_places`, shape (n,)
    )->np.ndarray: # int64, shape (n,)
        "How many samples there are before each of `places`"
        places = np.asarray(places, np.int64)
        if not len(self): return places
        runs = np.searchsorted(self.starts, places, 'right')
        # behind its run, a place has all the gaps of this run before it; within the run, all samples before the run
        return np.where(runs>0, np.maximum(places-self._before[runs], self._firsts[np.maximum(runs-1, 0)]), places)

    def to_bytes(self)->bytes:
        "The runs as they are stored: starts and lengths, each as int64, little-endian"
        return np.stack([self.starts, np.diff(self._before.astype(np.int64))]).astype('<i8').tobytes()

    @classmethod
    def from_bytes(cls,
        stored:bytes, # What `to_bytes` returned
        n_places:int # As in `GapTable`
    ):
        "The table; raises `ValueError` if `stored` cannot be one of `n_places` places"
        return cls(*np.frombuffer(stored, '<i8').reshape(2, -1), n_places)

"""Recordings: the fields that hold them, and how they are decoded

Docs: page `codec/audio`"""

# Recordings are stored as files, in fields such as `wav` or `flac`, or as arrays in fields such as `audio.npy`. In both
# cases they become 32-bit floats of shape (channels, values). Whole numbers are scaled to [-1, 1], as soundfile and
# torchaudio do.
#
# Wav files with whole numbers need no other package. Other files need soundfile or torchaudio, or a codec of your own
# that decodes them to arrays.

import io, struct
from importlib.util import find_spec

import numpy as np

AUDIO_FILES = 'wav','flac','mp3','ogg','opus','m4a'   # last parts of the names of fields with recordings

def is_audio(
    field:str # Name of a field
)->bool:
    "Does the field hold recordings: files, by the last part of its name, or arrays, by a part `audio`?"
    parts = field.lower().split('.')
    return parts[-1] in AUDIO_FILES or 'audio' in parts and parts[-1] in ('npy','npz')

def audio_floats(
    a:np.ndarray # Floats, whole numbers of 8 bits, or signed ones of 16 or 32 bits, of any shape
)->np.ndarray: # float32, same shape
    """A copy of `a` as 32-bit floats; whole numbers are scaled to [-1, 1], and floats are not scaled

    Those without a sign have their zero at 128. Raises `ValueError` for other arrays."""
    if a.dtype.kind=='f': return a.astype(np.float32)
    if a.dtype==np.uint8: return (a.astype(np.float32)-128)/128
    if a.dtype.kind!='i' or a.dtype.itemsize>4:
        raise ValueError('a recording has floats, or whole numbers of 8 bits or signed ones of 16 or 32, not '
                         f'{a.dtype}: convert it when it is written, such as by .astype(np.float32)')
    return (a/(1<<8*a.dtype.itemsize-1)).astype(np.float32)

# --- Files

# A wav file consists of chunks: `fmt ` describes the values, and `data` has them. Other formats are left to soundfile
# or torchaudio.

_NO_LENGTH = 0xFFFFFFFF # What ffmpeg writes as a length into a pipe, where it cannot go back
_PCM,_EXTENSIBLE = 1,0xFFFE # Formats of wav files: whole numbers; a format whose name follows
_EXTENSIBLE_PCM = bytes.fromhex('0100000000001000800000aa00389b71')   # the name of whole numbers

def _read_wav(b):
    """(float32 array of shape (channels, values), values per second) of a wav file with whole numbers of 8 to 32 bits

    `None` for a wav file of another format. A file whose header does not say its length, as it was written into a pipe,
    is read to its end. Raises `ValueError` for a damaged file, and if values are missing."""
    header,start,size = _wav_chunks(b)
    if len(header)<16: raise ValueError('a damaged wav file: the description of its format is missing or cut off')
    kind,channels,rate,_,_,bits = struct.unpack_from('<HHIIHH', header)
    width = (bits+7)//8
    if kind==_EXTENSIBLE and header[24:40]==_EXTENSIBLE_PCM: kind = _PCM
    if kind!=_PCM or width>4: return None
    if not channels*width: raise ValueError(f'a damaged wav file: {channels} channels of {bits} bits')
    there,riff_end = len(b)-start,int.from_bytes(b[4:8], 'little')+8
    # other programs write 0, and the end of the file where the values begin
    if size==_NO_LENGTH or not size and (riff_end<=start or riff_end>_NO_LENGTH):
        if there%(channels*width): raise ValueError(f'the wav file ends within a value: it has {there:,} bytes of them')
        size = there
    n = size//(channels*width)
    values = b[start:start+n*channels*width]
    if len(values)!=n*channels*width:
        raise ValueError(f'the header of the wav file promises {n:,} values, and {there//(channels*width):,} are there')
    if width==3: a = np.pad(np.frombuffer(values, np.uint8).reshape(-1, 3), ((0,0),(1,0))).view('<i4').ravel()
    else: a = np.frombuffer(values, {1:'u1', 2:'<i2', 4:'<i4'}[width])
    return audio_floats(a.reshape(-1, channels).T),rate

def _wav_chunks(b):
    """(bytes that describe the format, place of the first value, bytes of values by the header) of a wav file

    Raises `ValueError` if no values are announced."""
    header,start = b'',12
    while start+8<=len(b):
        name,size = struct.unpack_from('<4sI', b, start)
        start += 8
        if name==b'data': return header,start,size
        if name==b'fmt ': header = b[start:start+size]
        start += size+size%2
    raise ValueError(f'a damaged wav file of {len(b):,} bytes: it has no values')

def read_audio(
    content:bytes # A recording as a file
)->tuple: # (float32 array of shape (channels, values), values per second)
    """Decode a recording: a wav file with whole numbers by NumPy, others by soundfile, or else torchaudio

    Raises `ValueError` if it is damaged, `ImportError` if one of these packages is needed and neither is there, and
    what torchaudio raises."""
    if not content or content[:4]==b'RIFF' and len(content)<12:
        raise ValueError(f'a damaged recording of {len(content)} bytes')
    if content[:4]==b'RIFF' and content[8:12]==b'WAVE':
        found = _read_wav(content)
        if found is not None: return found
    if find_spec('soundfile'):
        import soundfile
        try: values,rate = soundfile.read(io.BytesIO(content), dtype='float32', always_2d=True)
        except soundfile.LibsndfileError as e: raise ValueError(f'soundfile: {e}') from None
        return values.T,rate
    if find_spec('torchaudio'):
        import torchaudio
        try: values,rate = torchaudio.load(io.BytesIO(content))
        except ImportError: pass   # from 2.9 on it needs torchcodec
        else: return values.numpy(),rate
    raise ImportError(f'a recording that begins with {content[:4]!r} needs a decoder: install soundfile (pip install '
                      'soundfile), or register a codec of your own for the field (register_codec), which returns '
                      'arrays; only wav files with whole numbers of up to 32 bits need none')

def recording_of(
    o # The bytes of a file, or an array, (values,) or (channels, values)
)->tuple: # (float32 array of shape (channels, values), values per second, or `None` for an array)
    "A recording in any form; raises `ValueError` for another shape, and what `read_audio` and `audio_floats` raise"
    values,rate = read_audio(o) if isinstance(o, bytes) else (audio_floats(np.asarray(o)),None)
    if values.ndim==1: values = values[None]
    if values.ndim==2: return values,rate
    raise ValueError(f'a recording has the shape (values,) or (channels, values), not {values.shape}')

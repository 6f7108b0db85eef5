"""What holds a training back: the time of each stage of the loader, beside that of the model"""
from typing import Any
__all__: Any
from dataclasses import dataclass
import numpy as np
from fastai.callback.core import Callback
from .loader import RemoteDL
PARTS: Any
DATA: Any
STAGES: Any

def _in_ms(names, seconds):
    ...

@dataclass(repr=False)
class LoaderTimes:
    parts: dict
    stages: dict
    samples: float
    num_workers: int = 0
    threads: int = 0
    prefetch: int = 1

    def lanes(self) -> list:
        ...

    @property
    def data(self) -> float:
        ...

    @property
    def step(self) -> float:
        ...

    @property
    def limit(self) -> str:
        ...

    def __repr__(self):
        ...

class History:
    keep: Any
    n: Any
    per: Any
    rows: Any
    total: Any
    part: Any

    def __init__(self, keep: int=512):
        ...

    def add(self, row: np.ndarray):
        ...

    def mean(self) -> np.ndarray:
        ...

def _parts(marks, m, opened, is_first):
    ...

class StepHistory:
    rows: Any
    pending: Any
    setup: Any
    marks: Any
    m: Any
    loader: Any
    is_first: Any

    def __init__(self):
        ...

    def begin(self, dl):
        ...

    def mark(self, event):
        ...

    def finish(self, samples: int):
        ...

    def _add(self):
        ...

    def end(self):
        ...

    def times(self) -> LoaderTimes:
        ...
_LITTLE: Any

class LoaderStats(Callback):
    order: Any
    run_valid: Any
    _stateattrs: Any
    history: Any
    times: Any
    advice: Any
    run: Any

    def before_fit(self):
        ...

    def before_train(self):
        ...

    def before_batch(self):
        ...

    def after_loss(self):
        ...

    def before_backward(self):
        ...

    def after_backward(self):
        ...

    def before_step(self):
        ...

    def after_step(self):
        ...

    def after_batch(self):
        ...

    def after_train(self):
        ...

    def after_fit(self):
        ...

    def line(self) -> str:
        ...

    def plot(self, figsize=(10, 3)):
        ...

def _images_of(dl, n):
    ...

def _build_seconds(dl, batch):
    ...

def shrink_gain(dl, n: int=16) -> tuple:
    ...

def advice_for(times: LoaderTimes, dl: RemoteDL) -> list:
    ...

def _enough_prefetch(times):
    ...
_COLORS: Any

@dataclass(repr=False)
class LoaderSpeed:
    times: LoaderTimes
    samples_per_s: float

    @property
    def stages(self) -> dict:
        ...

    def __repr__(self):
        ...

def load_for(dl, seconds: float) -> LoaderSpeed:
    ...

def _rate(dl, arrivals, first):
    ...

def _speed(dl, seconds, **options):
    ...

def _candidates(dl, cores):
    ...

@dataclass(repr=False)
class Tuned:
    rates: dict
    best: tuple

    def __repr__(self):
        ...

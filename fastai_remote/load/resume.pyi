"""A training that is stopped anywhere goes on exactly there"""
from typing import Any
__all__: Any
from contextlib import contextmanager
from fastai.callback.core import Callback
from fastai.learner import Learner

def _is_a(o, name):
    ...

def _loaders(learn):
    ...

def _epochs(learn, fit, resume):
    ...

def counted_fit(before):
    ...

class Resume(Callback):
    order: Any
    _stateattrs: Any
    was_read: Any
    is_fitting: Any
    found: Any
    fits_done: Any
    n_epochs: Any
    trained: Any
    warned: Any
    told: Any
    file: Any
    every: Any
    minutes: Any
    again: Any
    writer: Any
    writing: Any
    agreement: Any
    at_first: Any
    fit_number: Any
    goes_on: Any
    saved_at: Any
    learn: Any

    def __init__(self, url, every: int | None=None, minutes: float=10, again: bool=False, storage_options: dict | None=None):
        ...

    def _init_state(self):
        ...

    def __setattr__(self, name, value):
        ...

    def is_done(self, learn: Learner, fit: int, n_epoch: int) -> bool:
        ...

    def begin(self, fit: int) -> int:
        ...

    def _train_loader(self):
        ...

    def _check(self, found, train):
        ...

    def begin_epoch(self):
        ...

    def before_train(self):
        ...

    def _all_batches(self, stock):
        ...

    def _at_end(self):
        ...

    def after_batch(self):
        ...

    def _objects(self, learn):
        ...

    def _gathered(self):
        ...

    def _warn(self, o, names):
        ...

    def _save(self, state):
        ...

    def _restore(self, learn, found):
        ...

    @contextmanager
    def fitting(self):
        ...

    def _on_signal(self, process, number, frame):
        ...

    def _stop(self, told):
        ...

    def finish(self, learn: Learner, fit: int):
        ...

def _say(text):
    ...

def _place_of(state):
    ...

class _Agreement:
    group: Any
    work: Any
    value: Any
    rank: Any
    n: Any

    def __init__(self):
        ...

    def check_same(self, place: str, name: str):
        ...

    def of_all(self, number: int) -> int:
        ...

def _text_of(logger):
    ...

def _put_text(logger, text):
    ...

"Two trainings and an ingest on one server with random faults, for two minutes; `make soak` is the same for an hour"
import os, random

import pytest

from soak import soak

@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_epoch_is_exact_and_nothing_grows_whatever_happens_to_the_server():
    seconds = float(os.environ.get('SOAK_SECONDS', 120))
    assert soak(seconds, random.randrange(1<<30), os.environ.get('SOAK_STORE', 'server'))==[]

"""What is silenced while a model is built comes back, in every thread."""

import logging
import sys
from concurrent.futures import ThreadPoolExecutor
from time import sleep

from tl_posgen.models.conversion.hugging_face import silenced


def test_log_lines_and_prints_are_back_after_threads_that_overlapped():
    before, out = logging.root.manager.disable, sys.stdout

    def silent_for(seconds: float) -> None:
        with silenced():
            sleep(seconds)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(silent_for, (0.05, 0.01, 0.03, 0.02)))
    assert (logging.root.manager.disable, sys.stdout) == (before, out)

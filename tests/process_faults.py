"""train.py with a fault: process PROCESS fails, is late or gets a signal when it reads batch BATCH, from 0, and notes
the time. Who is late is so once more at the end.

`python -m jfsdp.launch --nproc 2 -m tests.process_faults PROCESS BATCH hang|kill|late|later|raise|stop OPTIONS`
"""

import os
import random
import signal
import sys
import threading
import time
from pathlib import Path

import train
from jfsdp.batches import Batches


def sleep_forever() -> None:
    while True:
        time.sleep(60)


if __name__ == "__main__":
    process, number, how, *options = sys.argv[1:]
    read = Batches.__next__

    def read_or_fail(batches):
        if os.environ["RANK"] == process and batches.step == int(number):
            Path(options[3]).with_name("fault").write_text(str(time.time()))
            if how == "hang":
                sleep_forever()
            if how == "raise":
                raise ValueError("the disk is gone")
            if how == "late":
                time.sleep(35)
                return read(batches)
            end = lambda: os.kill(os.getpid(), signal.SIGTERM if how == "stop" else signal.SIGKILL)
            threading.Timer(random.random() if how == "later" else 0, end).start()
        return read(batches)

    Batches.__next__ = read_or_fail
    code = train.main(options)
    if os.environ["RANK"] == process and how == "late":
        time.sleep(35)
    sys.exit(code)

"""train.py with a fault: process PROCESS fails or gets a signal when it reads batch BATCH, from 0, and notes the time.

`python -m jfsdp.launch --nproc 2 -m tests.process_faults PROCESS BATCH kill|raise|stop OPTIONS`
"""

import os
import signal
import sys
import time
from pathlib import Path

import train
from jfsdp import data

if __name__ == "__main__":
    process, number, how, *options = sys.argv[1:]
    read = data.Batches.__next__

    def read_or_fail(batches):
        if os.environ["RANK"] == process and batches.step == int(number):
            Path(options[3]).with_name("fault").write_text(str(time.time()))
            if how == "raise":
                raise ValueError("the disk is gone")
            os.kill(os.getpid(), {"kill": signal.SIGKILL, "stop": signal.SIGTERM}[how])
        return read(batches)

    data.Batches.__next__ = read_or_fail
    sys.exit(train.main(options))

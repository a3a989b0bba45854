"""Expert-parallel dispatch and combine on any hardware that can write into a peer's memory."""

import logging
import os

from ubep.communicator import Communicator
from ubep.config import Config, resolve
from ubep.errors import UbepError
from ubep.expert_parallel import ExpertParallel
from ubep.handle import Handle, Received
from ubep.launch import launch
from ubep.topology import Topology
from ubep.workload import ExpertMap, Workload

__version__ = "0.1.0"

# Silent unless the application configures logging, or UBEP_LOG names a level.
logging.getLogger("ubep").addHandler(logging.NullHandler())
if "UBEP_LOG" in os.environ:
    logging.basicConfig(format="%(asctime)s %(name)s[%(process)d] %(levelname)s %(message)s")
    logging.getLogger("ubep").setLevel(os.environ["UBEP_LOG"].upper())

__all__ = [
    "Communicator",
    "Config",
    "ExpertMap",
    "ExpertParallel",
    "Handle",
    "Received",
    "Topology",
    "UbepError",
    "Workload",
    "__version__",
    "launch",
    "resolve",
]

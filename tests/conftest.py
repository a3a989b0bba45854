from __future__ import annotations

import torch
from hypothesis import settings

torch.set_num_threads(1)
settings.register_profile("ubep", deadline=None, print_blob=True)
settings.load_profile("ubep")

"""Where PyTorch 2.11 to 2.13 differ. Nothing else in kumi looks at PyTorch's version."""

from __future__ import annotations

import inspect
from typing import Any

from torch.nn.parallel import DistributedDataParallel


def ddp_without_buffer_sync() -> dict[str, Any]:
    """The argument with which DDP leaves buffers alone in the forward: 2.13 renamed `broadcast_buffers`."""
    names = inspect.signature(DistributedDataParallel.__init__).parameters
    return {"forward_sync_buffers" if "forward_sync_buffers" in names else "broadcast_buffers": False}

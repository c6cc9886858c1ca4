"""TorchAcc's interface, under the name that scripts import: `import fullshard.torchacc as torchacc`."""

import sys
from typing import TYPE_CHECKING

from fullshard.integrations import torchacc as _torchacc
from fullshard.integrations.torchacc import *  # noqa: F403 -- the same names, nothing else
from fullshard.integrations.torchacc import __all__ as __all__
from fullshard.integrations.torchacc import amp, config, dist

if not TYPE_CHECKING:
    __getattr__ = _torchacc.__getattr__

for _module in (amp, config, dist, dist.fsdp):  # so that `import fullshard.torchacc.dist` finds them too
    sys.modules[_module.__name__.replace("fullshard.integrations.", "fullshard.")] = _module

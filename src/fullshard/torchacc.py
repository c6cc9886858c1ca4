"""TorchAcc's interface, under the name that scripts import: `import fullshard.torchacc as torchacc`.

PyTorch/XLA trains if the installed versions of torch and torch_xla match; otherwise, fullshard's engine trains.
"""

import sys
from typing import TYPE_CHECKING

from fullshard.core.requirements import why_no_xla

if not TYPE_CHECKING and why_no_xla() is None:
    from fullshard.integrations.xla import torchacc as _torchacc
    from fullshard.integrations.xla.torchacc import *  # noqa: F403 -- the same names, nothing else
    from fullshard.integrations.xla.torchacc import __all__ as __all__

    _modules = {}
else:
    from fullshard.integrations import torchacc as _torchacc
    from fullshard.integrations.torchacc import *  # noqa: F403 -- the same names, nothing else
    from fullshard.integrations.torchacc import __all__ as __all__
    from fullshard.integrations.torchacc import amp, config, dist

    _modules = {"amp": amp, "config": config, "dist": dist, "dist.fsdp": dist.fsdp}

if not TYPE_CHECKING:
    __getattr__ = _torchacc.__getattr__

for _name, _module in _modules.items():  # so that `import fullshard.torchacc.dist` finds them too
    sys.modules[f"{__name__}.{_name}"] = _module

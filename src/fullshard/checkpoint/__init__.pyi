from fullshard.checkpoint.background import AsyncSaver as AsyncSaver
from fullshard.checkpoint.catalog import latest_checkpoint as latest_checkpoint
from fullshard.checkpoint.catalog import whole_checkpoints as whole_checkpoints
from fullshard.checkpoint.copies import MemoryCopies as MemoryCopies
from fullshard.checkpoint.export import export_hf as export_hf
from fullshard.checkpoint.export import is_exported_as_it_is as is_exported_as_it_is
from fullshard.checkpoint.full_state import full_state_dict as full_state_dict
from fullshard.checkpoint.full_state import load_full_state_dict as load_full_state_dict
from fullshard.checkpoint.full_state import local_state_dict as local_state_dict
from fullshard.checkpoint.load import load_checkpoint as load_checkpoint
from fullshard.checkpoint.load import prove_checkpoint as prove_checkpoint
from fullshard.checkpoint.pretrained import from_pretrained as from_pretrained
from fullshard.checkpoint.pretrained import load_pretrained as load_pretrained
from fullshard.checkpoint.save import save_checkpoint as save_checkpoint
from fullshard.checkpoint.stream import stream_weights as stream_weights
from fullshard.checkpoint.verify import Verification as Verification
from fullshard.checkpoint.verify import verify_checkpoint as verify_checkpoint

__all__: list[str]

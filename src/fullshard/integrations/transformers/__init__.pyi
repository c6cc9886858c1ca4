from fullshard.integrations.transformers.classes import DistillationConfig as DistillationConfig
from fullshard.integrations.transformers.classes import DistillationTrainer as DistillationTrainer
from fullshard.integrations.transformers.classes import DPOConfig as DPOConfig
from fullshard.integrations.transformers.classes import DPOTrainer as DPOTrainer
from fullshard.integrations.transformers.classes import GRPOConfig as GRPOConfig
from fullshard.integrations.transformers.classes import GRPOTrainer as GRPOTrainer
from fullshard.integrations.transformers.classes import KTOConfig as KTOConfig
from fullshard.integrations.transformers.classes import KTOTrainer as KTOTrainer
from fullshard.integrations.transformers.classes import RewardConfig as RewardConfig
from fullshard.integrations.transformers.classes import RewardTrainer as RewardTrainer
from fullshard.integrations.transformers.classes import RLOOConfig as RLOOConfig
from fullshard.integrations.transformers.classes import RLOOTrainer as RLOOTrainer
from fullshard.integrations.transformers.classes import Seq2SeqTrainer as Seq2SeqTrainer
from fullshard.integrations.transformers.classes import Seq2SeqTrainingArguments as Seq2SeqTrainingArguments
from fullshard.integrations.transformers.classes import SFTConfig as SFTConfig
from fullshard.integrations.transformers.classes import SFTTrainer as SFTTrainer
from fullshard.integrations.transformers.classes import Trainer as Trainer
from fullshard.integrations.transformers.classes import TrainingArguments as TrainingArguments
from fullshard.integrations.transformers.classes import sharded as sharded
from fullshard.integrations.transformers.ema_callback import EMACallback as EMACallback
from fullshard.integrations.transformers.install import install as install

__all__: list[str]

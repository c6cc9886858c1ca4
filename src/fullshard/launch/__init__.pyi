from fullshard.launch.environment import RankEnvironment as RankEnvironment
from fullshard.launch.environment import init_process_group_from_environment as init_process_group_from_environment
from fullshard.launch.environment import rank_device as rank_device
from fullshard.launch.environment import read_rank_environment as read_rank_environment
from fullshard.launch.environment import run_on_main as run_on_main

__all__: list[str]

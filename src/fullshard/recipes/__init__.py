"""Complete training jobs as plain functions over the engine. Read `train.py` from `train` downwards."""

"""Complete training jobs as plain functions over the engine. Start reading at `train` in `train.py`."""

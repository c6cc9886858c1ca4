"""Complete training jobs as plain functions that use the engine. Start reading at `train` in `train.py`."""

"""Text to Megatron's token files: what `tools/preprocess_data.py` is made of."""

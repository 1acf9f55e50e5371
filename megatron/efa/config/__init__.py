"""YAML (Hydra) and `key=value` words to Megatron's own flags; docs/config.md states the scheme."""

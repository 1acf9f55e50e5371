"""Megatron-EFA: topology-aware communication for Megatron-LM, and what one needs to run it."""

__version__ = "0.1.0"

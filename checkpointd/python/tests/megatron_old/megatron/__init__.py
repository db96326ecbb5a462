"""Stands for Megatron-LM 0.4: as much of it as checkpoints need."""

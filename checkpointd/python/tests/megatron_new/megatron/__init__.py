"""Stands for Megatron-LM with megatron.training: as much of it as checkpoints need."""

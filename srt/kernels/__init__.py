"""Compute kernels of our own, one package a kind of device."""

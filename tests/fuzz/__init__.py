"""Random calls against dense float64: `python -m fuzz --help` in tests/, `make fuzz`, `make gpu-fuzz`."""

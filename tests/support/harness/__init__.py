"""How tests are run: stages, launchers, time limits, and one outcome for all ranks."""

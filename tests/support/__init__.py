"""What tests are written with: the harness that runs them, simulated surroundings, and what several of them train."""

"""How a job ends: a rank fails, is interrupted, leaves early, or comes to its end with all others."""

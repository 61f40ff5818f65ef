"""Which rank is chief, worker, parameter server or evaluator."""

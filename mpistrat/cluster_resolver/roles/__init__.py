"""Gives each rank its task: chief, worker, parameter server or evaluator."""

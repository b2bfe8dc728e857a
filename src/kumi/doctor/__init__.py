"""Checks of one machine or of all nodes of a run: `kumi doctor`, and the start of every run.

run_doctor.doctor(config)      -> Examination, with one Finding per check
run_doctor.check_before_training(config, standing)   raises ConfigError if a check failed that stops a run
"""

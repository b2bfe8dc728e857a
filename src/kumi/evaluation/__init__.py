"""Score models on texts and tasks, on any layout.

run_evaluation      the models of `kumi eval`, one after the other, each on the ranks of a layout
evaluated_model     a model on those ranks: rank 0 leads, the others serve; rows of requests from score_requests
resumed_model       an evaluated model with scores and replies in a file (recorded_scores): an evaluation can go on
later text_model          a model that scores and generates texts: their tokens, and windows over them (rolling_windows)
run_task            kumi's own tasks: task_rows in, task_result out
"""

"""The batch job: the plan, the tasks, and the pipeline that runs them."""

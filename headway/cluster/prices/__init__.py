"""Where a training job is cheapest: recorded prices of instances, strategies, hindsight, deadlines."""

"""What several verbs need: output, the run that is meant, options of a launch, the explanation of a run."""

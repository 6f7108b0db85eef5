"How does a person look at a dataset?"

"How does a batch reach the model?"

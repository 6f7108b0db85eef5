"How does a dataset appear completely or not at all?"

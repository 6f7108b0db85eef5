"Where are samples read from?"

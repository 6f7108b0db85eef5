"Where do samples come from?"

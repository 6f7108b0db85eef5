"And in a shell?"

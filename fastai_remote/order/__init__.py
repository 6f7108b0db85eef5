"In which order are samples visited?"

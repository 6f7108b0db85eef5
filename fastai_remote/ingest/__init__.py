"How do samples get into a store?"

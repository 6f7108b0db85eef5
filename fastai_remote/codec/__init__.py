"How does an object become bytes, and bytes the object?"

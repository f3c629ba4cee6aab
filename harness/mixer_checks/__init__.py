"""The checks of a whole mixer: of its state, of parts and packed documents, of precisions and parameters."""

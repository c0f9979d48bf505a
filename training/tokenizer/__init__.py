"""How text becomes tokens: strangers' tokenizers; one encoder for training, evaluation, samples, server and exports; chat templates."""

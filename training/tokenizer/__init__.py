"""How text becomes tokens: pretrained tokenizers, one encoder for every use of a model, chat templates."""

"""How does a language model's attention use position?"""

// nothing here is ever compiled

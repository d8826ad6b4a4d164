"""The paper in torch, in the order of its sections: the specification of the engines."""

"""Tables of any size, pooled part by part: what is read, who pools it, and how nothing is lost or done twice."""

package pickle

// Get is the attribute of a name, nil if it is missing or None.
func (o *Object) Get(name string) any {
	if o == nil {
		return nil
	}
	return o.State.Get(name)
}

// Str is an attribute that is a string, "" otherwise.
func (o *Object) Str(name string) string {
	s, _ := o.Get(name).(string)
	return s
}

// Int is an attribute that is a number, without its fraction; 0 otherwise.
func (o *Object) Int(name string) int {
	return IntOf(o.Get(name))
}

// Float is an attribute that is a number, 0 otherwise.
func (o *Object) Float(name string) float64 {
	switch v := o.Get(name).(type) {
	case int64:
		return float64(v)
	case float64:
		return v
	}
	return 0
}

// Object is an attribute that is an object, nil otherwise.
func (o *Object) Object(name string) *Object {
	v, _ := o.Get(name).(*Object)
	return v
}

// Dict is an attribute that is a dict, an empty one otherwise.
func (o *Object) Dict(name string) *Dict {
	if d, ok := o.Get(name).(*Dict); ok {
		return d
	}
	return &Dict{}
}

// List is an attribute that is a list, nil otherwise.
func (o *Object) List(name string) []any {
	if l, ok := o.Get(name).(*List); ok {
		return l.Items
	}
	return nil
}

// Get is the last value under a key, as in Python; nil if there is none.
func (c *Dict) Get(key any) any {
	for i := len(c.Pairs) - 1; i >= 0; i-- {
		if c.Pairs[i].Key == key {
			return c.Pairs[i].Value
		}
	}
	return nil
}

// IntOf is v if that is a number, without its fraction; 0 for anything else.
func IntOf(v any) int {
	switch v := v.(type) {
	case int64:
		return int(v)
	case float64:
		if v > -1<<53 && v < 1<<53 { // larger numbers and NaN carry no information
			return int(v)
		}
	case bool:
		if v {
			return 1
		}
	}
	return 0
}

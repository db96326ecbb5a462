// Package pyproto speaks the protocol of DLRover's master, which is written in Python: pickled dataclasses in two
// remote procedures, get and report, over gRPC or over HTTP with JSON. It needs neither: pickles are read by a decoder
// that makes no objects (Decode), gRPC is one POST over HTTP/2 for every call, with net/http.
//
// Sources: DLRover's dlrover/proto/elastic_training.proto, dlrover/python/common/comm.py and
// dlrover/python/master/servicer.py, versions 0.3.8 to 0.6.1, and the messages that these versions sent in tests.
package pyproto

import "fmt"

// Dialect is the Python module in which a version of DLRover has its messages. Who answers uses the caller's.
type Dialect string

// The dialects.
const (
	Grpc Dialect = "dlrover.python.common.grpc" // to 0.4
	Comm Dialect = "dlrover.python.common.comm" // from 0.5 on
)

// Dialects are all, the newest first.
func Dialects() []Dialect { return []Dialect{Comm, Grpc} }

// Message is an instance of one of DLRover's classes.
type Message = Object

// ReadMessage reads a pickle that is a message in one of the dialects.
func ReadMessage(data []byte) (*Message, error) {
	v, err := Decode(data)
	if err != nil {
		return nil, err
	}
	m, ok := v.(*Object)
	if !ok || m.Dialect() != Comm && m.Dialect() != Grpc {
		return nil, fmt.Errorf("%w: a %s where a message of DLRover is needed", ErrPickle, describe(v))
	}
	return m, nil
}

func describe(v any) string {
	if o, ok := v.(*Object); ok {
		return fmt.Sprintf("%.100s.%.100s", o.Class.Module, o.Class.Name)
	}
	return fmt.Sprintf("%T", v)
}

// Field is an attribute of a message.
type Field struct {
	Name  string
	Value any // as Encode takes it
}

// New makes a message of a dialect.
func (d Dialect) New(name string, fields ...Field) *Message {
	m := &Message{Class: Class{string(d), name}}
	for _, f := range fields {
		m.State.Pairs = append(m.State.Pairs, Pair{f.Name, f.Value})
	}
	return m
}

// Dialect is the module of the message's class.
func (o *Object) Dialect() Dialect { return Dialect(o.Class.Module) }

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
	return toInt(o.Get(name))
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

func toInt(v any) int {
	switch v := v.(type) {
	case int64:
		return int(v)
	case float64:
		if v > -1<<53 && v < 1<<53 { // the rest, and what is no number, says nothing
			return int(v)
		}
	case bool:
		if v {
			return 1
		}
	}
	return 0
}

// IntOf is a number that came in a container, without its fraction; 0 for anything else.
func IntOf(v any) int { return toInt(v) }

// BytesOf are the bytes of a value of the key-value store, which agents write as bytes or as text.
func BytesOf(v any) []byte {
	switch v := v.(type) {
	case []byte:
		return v
	case string:
		return []byte(v)
	}
	return nil
}

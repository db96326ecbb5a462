package switchbox

import (
	"errors"
	"slices"
)

// Facts are all answers of one Device at one moment. A nil pointer or slice is unsupported or has failed.
type Facts struct {
	Identity
	Mode     Mode         `json:"mode,omitzero"`
	Links    []Link       `json:"links,omitempty"`
	Errors   []LinkErrors `json:"link_errors,omitempty"` // by link
	Traffic  *Traffic     `json:"traffic,omitempty"`
	Fabric   *Fabric      `json:"fabric,omitempty"`
	Peers    map[int]Peer `json:"peers,omitempty"` // by Identity.Index
	Memory   *Memory      `json:"memory,omitempty"`
	ECC      *ECC         `json:"ecc,omitempty"`
	Remap    *Remap       `json:"remap,omitempty"`
	PCIe     *PCIe        `json:"pcie,omitempty"`
	Clocks   *Clocks      `json:"clocks,omitempty"`
	Recovery Recovery     `json:"recovery,omitempty"`
	Xids     []Xid        `json:"xids,omitempty"`
	// Lost is the call that returned ErrLost and its text: no further call was made. Unsupported are the methods of
	// Device that returned ErrNotSupported, Failed those with another error.
	Lost        string   `json:"refused,omitempty"` // method: error; "lost" was a bool
	Unsupported []string `json:"unsupported,omitempty"`
	Failed      []string `json:"failed,omitempty"` // method: error
}

// Active is the number of links that are active.
func (f Facts) Active() (n int) {
	for _, l := range f.Links {
		if l.Active {
			n++
		}
	}
	return n
}

// maxLinks bounds a Device's number of links.
const maxLinks = 64

// Read asks every Device everything. It announces each call through calling (which may be nil), so that a watchdog
// knows the call in which the driver hangs.
func Read(devices []Device, calling func(device int, method string)) []Facts {
	return readWith(devices, calling, func(r reader, d Device) {
		r.use(d)
		r.state(d)
		r.links(d)
		r.peers(d, devices)
	})
}

// ReadUse reads only the identities of the devices and their memory in use.
func ReadUse(devices []Device, calling func(device int, method string)) []Facts {
	return readWith(devices, calling, reader.use)
}

func readWith(devices []Device, calling func(device int, method string), ask func(reader, Device)) []Facts {
	all := make([]Facts, len(devices))
	for i, d := range devices {
		r := reader{facts: &all[i], calling: func(string) {}}
		if calling != nil {
			r.calling = func(method string) { calling(i, method) }
		}
		r.calling("Identity")
		r.facts.Identity = d.Identity()
		ask(r, d)
		all[i].clean()
	}
	return all
}

// clean makes one line of every text that a driver or a process has chosen.
func (f *Facts) clean() {
	texts := []*string{&f.Name, &f.UUID, &f.PCI}
	if f.Fabric != nil {
		texts = append(texts, &f.Fabric.Status, &f.Fabric.Cluster)
	}
	if f.Memory != nil {
		f.Memory.Users = slices.Clone(f.Memory.Users)
		for i := range f.Memory.Users {
			texts = append(texts, &f.Memory.Users[i].Name)
		}
	}
	f.Xids = slices.Clone(f.Xids)
	for i := range f.Xids {
		texts = append(texts, &f.Xids[i].Text)
	}
	for i := range f.Links {
		texts = append(texts, &f.Links[i].PCI)
	}
	for _, t := range texts {
		*t = oneLine(*t)
	}
}

// reader collects the Facts of one Device.
type reader struct {
	facts   *Facts
	calling func(method string)
}

// ask makes one call and keeps its error; nil means that the call failed.
func ask[T any](r reader, method string, call func() (T, error)) *T {
	if r.facts.Lost != "" {
		return nil
	}
	r.calling(method)
	v, err := call()
	switch {
	case err == nil:
		return &v
	case errors.Is(err, ErrNotSupported):
		r.facts.Unsupported = with(r.facts.Unsupported, method)
	case errors.Is(err, ErrLost):
		r.facts.Lost = oneLine(method + ": " + err.Error())
	default:
		r.facts.Failed = with(r.facts.Failed, oneLine(method+": "+err.Error()))
	}
	return nil
}

// with appends s unless it is there: a method fails on all links alike.
func with(list []string, s string) []string {
	if slices.Contains(list, s) {
		return list
	}
	return append(list, s)
}

func (r reader) use(d Device) {
	r.facts.Mode = value(ask(r, "Mode", d.Mode))
	r.facts.Memory = ask(r, "Memory", d.Memory)
}

func (r reader) state(d Device) {
	f := r.facts
	f.Traffic = ask(r, "Traffic", d.Traffic)
	f.Fabric = ask(r, "Fabric", d.Fabric)
	f.ECC = ask(r, "ECC", d.ECC)
	f.Remap = ask(r, "Remap", d.Remap)
	f.PCIe = ask(r, "PCIe", d.PCIe)
	f.Clocks = ask(r, "Clocks", d.Clocks)
	f.Recovery = value(ask(r, "Recovery", d.Recovery))
	f.Xids = value(ask(r, "Xids", d.Xids))
}

func (r reader) links(d Device) {
	for i := range min(value(ask(r, "Links", d.Links)), maxLinks) {
		link := ask(r, "Link", func() (Link, error) { return d.Link(i) })
		if link == nil {
			link = &Link{Unknown: true}
		}
		errs := ask(r, "LinkErrors", func() (LinkErrors, error) { return d.LinkErrors(i) })
		if errs == nil {
			errs = &LinkErrors{Replay: -1, Recovery: -1, RecoveryFailed: -1, CRC: -1}
		}
		r.facts.Links = append(r.facts.Links, *link)
		r.facts.Errors = append(r.facts.Errors, *errs)
	}
}

func (r reader) peers(d Device, devices []Device) {
	r.facts.Peers = map[int]Peer{}
	for _, other := range devices {
		index := other.Identity().Index
		if index == r.facts.Index {
			continue
		}
		if p := ask(r, "Peer", func() (Peer, error) { return d.Peer(index) }); p != nil {
			r.facts.Peers[index] = *p
		}
	}
}

func value[T any](p *T) (v T) {
	if p != nil {
		v = *p
	}
	return v
}

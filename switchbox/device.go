// Package switchbox judges the accelerators of one node and the links between them.
//
// It is pure: a driver's answers come in through Device, the results of an active copy as Measurements, and findings go
// out as a Report. switchbox/nvml and switchbox/metax are its adaptors, switchbox/fake is for tests.
package switchbox

import "errors"

// The errors of a Device with a meaning of their own. Any other error is judged as a warning.
var (
	// ErrNotSupported: this device, its driver or its mode (MIG, a virtual GPU) has no such thing.
	ErrNotSupported = errors.New("not supported")
	// ErrLost: the device is of no use: it has fallen off the bus, or its driver refuses it. The wrapping error gives
	// the reason, in the driver's words.
	ErrLost = errors.New("the driver refuses the device")
)

// Device is one accelerator as its driver reports it. A call may block for as long as the driver does. Counters grow
// from the driver's start, so only their growth over a time is evidence about that time.
type Device interface {
	// Identity identifies the device. Fields that the driver does not know are empty.
	Identity() Identity
	// Mode is whether the device is divided or virtual; much else is not supported then.
	Mode() (Mode, error)
	// Links is the number of links, up to 64; their numbers are 0 to Links-1.
	Links() (int, error)
	// Link is the state and the remote end of one link.
	Link(link int) (Link, error)
	// LinkErrors are the error counters of one link.
	LinkErrors(link int) (LinkErrors, error)
	// Traffic counts the bytes over all links together.
	Traffic() (Traffic, error)
	// Fabric is the state of the device's registration with the switches that join the GPUs.
	Fabric() (Fabric, error)
	// Peer is the path from this device to the one with Identity.Index other.
	Peer(other int) (Peer, error)
	// Memory is how much of the device's memory is in use, and by whom.
	Memory() (Memory, error)
	// ECC are the memory errors since the driver's start.
	ECC() (ECC, error)
	// Remap is the state of memory rows (or, before Ampere, pages) that are taken out of use.
	Remap() (Remap, error)
	// PCIe is the state of the link to the host.
	PCIe() (PCIe, error)
	// Clocks are how fast the device works now, and what slows it down.
	Clocks() (Clocks, error)
	// Recovery is the action that the driver wants for the device.
	Recovery() (Recovery, error)
	// Xids are the errors that the driver has reported for this device since the adaptor was opened.
	Xids() ([]Xid, error)
}

// Identity names a device.
type Identity struct {
	Index  int    `json:"index"`            // the driver's number, from 0
	Name   string `json:"name,omitempty"`   // product
	UUID   string `json:"uuid,omitempty"`   // GPU-...
	PCI    string `json:"pci,omitempty"`    // 0000:1b:00.0, in lower case
	Module int    `json:"module,omitempty"` // place on the baseboard, from 1; 0 is unknown
}

// Mode is how the device is presented.
type Mode struct {
	MIG     bool `json:"mig,omitempty"`     // divided into instances
	Virtual bool `json:"virtual,omitempty"` // a vGPU; a GPU that is passed through as a whole is none
}

// Remote is the kind of device at the other end of a link.
type Remote string

// The kinds of remote ends.
const (
	RemoteUnknown Remote = ""
	RemoteGPU     Remote = "gpu"
	RemoteSwitch  Remote = "switch"
	RemoteCPU     Remote = "cpu"
)

// Link is one link of a device.
type Link struct {
	Active  bool   `json:"active"`
	Unknown bool   `json:"unknown,omitempty"` // Read could not learn anything of it
	Version int    `json:"version,omitempty"` // as the driver numbers it; 0 is unknown
	MBps    int    `json:"mbps,omitempty"`    // nominal, in 10^6 byte/s and direction; 0 is unknown
	Remote  Remote `json:"remote,omitempty"`
	PCI     string `json:"pci,omitempty"` // of the remote end
}

// LinkErrors are counters of one link; -1 is not supported. All but the sum of failed recoveries happen now and then on
// a sound link.
type LinkErrors struct {
	Replay         int64 `json:"replay"`          // packets that were sent again
	Recovery       int64 `json:"recovery"`        // link trainings that succeeded
	RecoveryFailed int64 `json:"recovery_failed"` // link trainings that did not
	CRC            int64 `json:"crc"`             // damaged flits or packets, data or control
}

// Traffic is bytes over all links of a device, without protocol overhead.
type Traffic struct {
	Sent     uint64 `json:"sent"`
	Received uint64 `json:"received"`
}

// FabricState is how far a device has come in registering with its switches.
type FabricState string

// The states of the fabric.
const (
	FabricNotSupported FabricState = "not_supported" // there are no switches
	FabricNotStarted   FabricState = "not_started"
	FabricInProgress   FabricState = "in_progress"
	FabricCompleted    FabricState = "completed"
)

// Fabric is a device's registration with the switches, and the health that they report.
type Fabric struct {
	State FabricState `json:"state"`
	// Status is why a completed registration is none, in words; "" is success.
	Status string `json:"status,omitempty"`
	// Cluster and Clique name the NVLink domain; "" and 0 when there is none.
	Cluster string `json:"cluster,omitempty"`
	Clique  int    `json:"clique,omitempty"`
	// Of the health mask. Drivers without the mask report false.
	Degraded      bool `json:"degraded,omitempty"`      // less bandwidth than there should be
	Recovering    bool `json:"recovering,omitempty"`    // routes are being repaired
	Unhealthy     bool `json:"unhealthy,omitempty"`     // routes are broken
	Timeouts      bool `json:"timeouts,omitempty"`      // accesses through the fabric time out
	Misconfigured bool `json:"misconfigured,omitempty"` // topology, partition or addresses are set wrongly
}

// P2P is one ability between two devices.
type P2P string

// The states of an ability; the names are those of NVML.
const (
	P2POK       P2P = "OK"
	P2PChipset  P2P = "CNS" // not supported by the chipset
	P2PGPU      P2P = "GNS" // not supported by the GPU
	P2PTopology P2P = "TNS" // not supported in this topology
	P2PDisabled P2P = "DR"  // disabled by a registry key
	P2PNone     P2P = "NS"  // not supported
	P2PUnknown  P2P = "U"
)

// Peer is how one device reaches another one directly.
type Peer struct {
	Read   P2P `json:"read"`
	Write  P2P `json:"write"`
	NVLink P2P `json:"nvlink"`
}

// Memory is the use of a device's memory, in bytes.
type Memory struct {
	Total uint64 `json:"total"`
	Used  uint64 `json:"used"` // without the driver's reserve
	Own   uint64 `json:"own"`  // of Used, that of this process
	// Users are the other processes as far as this one may see them.
	Users []User `json:"users,omitempty"`
}

// User is a process that uses a device.
type User struct {
	PID  int    `json:"pid"`
	Name string `json:"name,omitempty"` // of the program
	Used uint64 `json:"used"`           // bytes; 0 if the driver does not report it
}

// ECC counts memory errors.
type ECC struct {
	Enabled     bool   `json:"enabled"`
	Uncorrected uint64 `json:"uncorrected"`
	Corrected   uint64 `json:"corrected"`
}

// Remap is the state of rows of memory with errors.
type Remap struct {
	Uncorrectable int  `json:"uncorrectable"` // rows remapped for errors that could not be corrected
	Pending       bool `json:"pending"`       // a remapping waits for the device's reset
	Failed        bool `json:"failed"`        // there was no row left to remap to
}

// PCIe is the link to the host. Both values may be lower while the device is idle; 0 is unknown.
type PCIe struct {
	Gen      int   `json:"gen"`
	MaxGen   int   `json:"max_gen"` // of this device in this slot
	Width    int   `json:"width"`
	MaxWidth int   `json:"max_width"`
	Replay   int64 `json:"replay"` // counter; -1 is not supported
}

// Clocks are how fast a device works. One without work is slow for that reason, which is none of Held.
type Clocks struct {
	MHz     int      `json:"mhz"`               // of what computes
	Celsius int      `json:"celsius,omitempty"` // 0: unknown
	Held    []string `json:"held,omitempty"`    // what holds the clocks down, in words; not the usual limit of its power
}

// Recovery is the action for a device that its driver requires.
type Recovery string

// The recovery actions.
const (
	RecoverNothing  Recovery = "none"
	RecoverReset    Recovery = "reset"
	RecoverReboot   Recovery = "reboot"
	RecoverDrainP2P Recovery = "drain_p2p"
	RecoverDrain    Recovery = "drain_and_reset"
)

// Xid is one error that NVIDIA's driver has reported: https://docs.nvidia.com/deploy/xid-errors/.
type Xid struct {
	Number int    `json:"number"`
	Text   string `json:"text,omitempty"`
}
